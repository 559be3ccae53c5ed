"""OpenAI's package against relaylm serve. Usage: python examples/openai_client.py [http://127.0.0.1:8000]"""

import sys

from openai import OpenAI

server = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{server}/v1", api_key="none")
model = client.models.list().data[0].id
ask = {"model": model, "prompt": "the history of the", "max_tokens": 32, "seed": 1}

answer = client.completions.create(**ask, extra_body={"schedule": "sandwich:50%", "steps": 16})
print(answer.choices[0].text)
print(f"calls {answer.relaylm['calls']}, {100 * answer.relaylm['saved']:.0f}% of the FLOPs saved")

for chunk in client.completions.create(**ask, extra_body={"steps": 16}, stream=True):
    for choice in chunk.choices:
        print(choice.text, end="", flush=True)
print()
