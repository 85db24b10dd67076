"""Where two prompts first differ, and how."""
