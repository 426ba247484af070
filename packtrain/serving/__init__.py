"""The server: jobs for one context, in slots; HTTP around it (extra `server`), for clients of llama-server and OpenAI.

jobs (what is asked, what is told) → slots → engine, a thread that runs the model; asked (reading bodies) → native,
completions, chats (answers of each kind) → app (routes, keys, limits). Engine and slots know no HTTP.
"""
