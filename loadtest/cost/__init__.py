"""What the router costs alone: a decision, growth with replicas, sizing."""
