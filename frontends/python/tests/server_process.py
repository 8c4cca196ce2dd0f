"""A server as a process: serves, and answers each line of its input with its numbers, until the input ends."""

import json
import sys

import quinion


def main() -> None:
    name, memory, stores = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    with quinion.serve(name, memory=memory, stores=stores) as server:
        print("ready", flush=True)
        for _line in sys.stdin:
            print(json.dumps(server.stats()), flush=True)


main()
