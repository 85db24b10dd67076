"""What can be seen, and by whom: the story of one conversation, and the side channel of a shared cache."""
