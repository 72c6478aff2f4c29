"""Conversations: chat templates, the model's own forms of tool calls, and the messages between its turns."""
