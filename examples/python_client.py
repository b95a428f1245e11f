"""Stream one answer of a chat, then print what it took: python examples/python_client.py [host:port of a router]"""

import os
import sys

from tandem_client import Client, Credentials

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
credentials = Credentials(api_key=os.environ.get("TANDEM_API_KEY", ""))
question = [{"role": "user", "content": "Name three rivers."}]

with Client(address, credentials) as client:
    stream = client.stream(question, timeout_s=60, max_tokens=24, temperature=0)
    for piece in stream:
        print(piece.text, end="", flush=True)

result = stream.result
print(f"\n{result.usage.prompt_tokens} + {result.usage.completion_tokens} tokens, ended by {result.finish_reason}")
print(f"first token after {result.timings.first_token_ms:.1f} ms, path {result.path}")
