"""What runs on Kubernetes, as far as a machine without a cluster can see."""
