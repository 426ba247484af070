"""The server: jobs for one context, in slots; HTTP around it (extra `server`), for clients of llama-server and OpenAI.

generation_jobs → slots → engine_thread, which runs the model; json_fields and request_parsing (reading requests) →
llama_completion and openai_completions (shapes of answers) → routes → http_app. Engine and slots know no HTTP."""
