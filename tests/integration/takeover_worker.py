"""A writer process: batches of rows until it is fenced or done, each acknowledgement on stdout.

python -m tests.integration.takeover_worker URL OPTIONS-JSON NAME BATCHES
"""

import json
import sys

import reef

ROWS = 500


def row(worker, number):
    """Return a key and a value that anyone can check."""
    key = f"{worker}/{number:08}".encode()
    return key, b"value of " + key


def main(url, options, worker, batches):
    """Write; say which batch was acknowledged; stop quietly when fenced."""
    writer = reef.open(url, **json.loads(options)).writer("load", unfolded_bytes_max=1 << 30)
    print("open", flush=True)
    for number in range(int(batches)):
        batch = reef.Batch()
        for place in range(ROWS):
            batch.put(*row(worker, number * ROWS + place))
        try:
            writer.write(batch)
        except reef.FencedError:
            print("fenced", flush=True)
            return
        print(number, flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
