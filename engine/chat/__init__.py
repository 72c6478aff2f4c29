"""What is said in a conversation: the only place that turns sampled tokens into turns, and conversations into prompts.

sampled ids --reading--> `Turn`: reasoning, content, calls of tools
conversation --writing--> the chat template's text, complete or refused
ends: the tokens that end a turn of the model
"""
