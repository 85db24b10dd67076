"""The house itself: its words, its language and its floors are what the documents say."""
