"""What earlier prompts looked like."""
