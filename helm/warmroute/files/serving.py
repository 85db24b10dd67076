"""What `helm test` runs: `python serving.py URL SECONDS` ends well once the router is ready and says what it serves."""

import json
import ssl
import sys
import time
import urllib.error
import urllib.request

URL, SECONDS = sys.argv[1], float(sys.argv[2])
# Whether it serves, not who it is: the certificate may name the outside only.
UNCHECKED = ssl._create_unverified_context()  # noqa: S323, SLF001


def ask(path: str) -> tuple[int, bytes]:
    """Status and body; 0 where nobody answers."""
    try:
        with urllib.request.urlopen(URL + path, timeout=5, context=UNCHECKED) as answer:  # noqa: S310 - a Service's URL
            return answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read()
    except OSError as failed:
        return 0, str(failed).encode()


deadline = time.monotonic() + SECONDS
while (ready := ask("/readyz"))[0] != 200:
    if time.monotonic() > deadline:
        sys.exit(f"not ready after {SECONDS:.0f} s: {ready[0]} {ready[1].decode(errors='replace')}")
    time.sleep(1)
status, body = ask("/v1/models")
if status == 401:
    print("ready; what it serves is told to those with a key")
elif status != 200:
    sys.exit(f"/v1/models: {status} {body.decode(errors='replace')}")
else:
    print("ready; serves", ", ".join(model["id"] for model in json.loads(body)["data"]))
