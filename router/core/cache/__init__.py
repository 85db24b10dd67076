"""What replicas hold: our estimate, their own word, how far it is good."""
