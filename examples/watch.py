"""Draw a text as it appears, out of order. Usage: python examples/watch.py [http://127.0.0.1:8000]"""

import json
import sys

import httpx

server = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
ask = {"prompt": "the history of the", "length": 64, "schedule": "sandwich:50%", "steps": 32, "seed": 2}
with httpx.stream("POST", f"{server}/v1/denoise", json=ask, timeout=600) as answer:
    name, row = "", []
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            value = json.loads(line.removeprefix("data: "))
            if name == "start":
                row = [text or "·" for text in value["given"][0]]
            elif name == "written":
                for position, text in zip(value["positions"], value["texts"]):
                    row[position] = text
                print(f"\r{''.join(row)}  {value['model']:>4} t={value['t']:.2f}", end="", flush=True)
            elif name == "done":
                print("\n", value["relaylm"])
