"""The protocols by which programs ask a model: OpenAI's completions, chats and Responses, and Anthropic's messages.

    body --schema, responses, anthropic--> `ChatBody` --prompts, grammar--> token ids, sampling parameters
    tokens --answers--> `Answer` --form, responses, anthropic--> body or events of the protocol

`calls` has the protocols by their paths; read it first. Nothing here samples: `rolltree serve` (`engine/app/server/`)
and the server of a run's agents (`engine/agents/`) do.
"""
