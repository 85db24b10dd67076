"""What replicas hold: our estimate, their own word, and how far it is good."""
