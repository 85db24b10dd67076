"""Faces clients: the life of one request, read, placed, called, relayed, told.

edge       owns the parts and the listener; proxy is the story of one request
callers    whose request it is
reader     what a client asks: parsed, hashed; question is what comes of it
observer   what earlier prompts' texts say of it
attempts   placing and calling, until an answer has begun, within a retry_budget
relay      bytes from engine to client
answering  answers of our own: ids, errors, pages
"""
