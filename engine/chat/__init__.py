"""Turns sampled tokens into turns, and conversations into prompts, for every part that reads or writes what is said.

sampled ids --reading--> `Turn`: reasoning, content, calls of tools
conversation --writing--> the chat template's text, complete or refused
ends: the tokens that end a turn of the model
"""
