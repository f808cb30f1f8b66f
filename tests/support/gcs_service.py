"""Google Cloud Storage's XML API as its documentation states it, small, on a local socket.

There is no emulator that speaks the XML API well enough for the client, so this one responds as
the documentation says: generations and preconditions (412), ranges, listings, copies, multipart
uploads, compose of up to 32 whole objects of the target's storage class. It keeps every request, so
that tests can check them; and responds to the next requests with a status that a test chooses.
"""

import contextlib
import http.server
import re
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from itertools import count
from time import time
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

COMPOSE_MAX = 32


@dataclass(frozen=True)
class Sent:
    """A request, as it came."""

    method: str
    path: str
    query: dict
    headers: dict
    body: bytes


@dataclass
class Stored:
    """An object, as the service keeps it."""

    body: bytes
    generation: int
    modified_s: float = field(default_factory=time)
    storage_class: str = "STANDARD"


class GcsService:
    """One bucket, `bucket`, in memory."""

    def __init__(self):
        self.objects = {}
        self.requests = []
        self.refusals = []
        """(status, code, apply first?) for the next requests that match no other."""
        self.uploads, self.begun = {}, {}
        self._generations = count(1_700_000_000_000_000)
        self._lock = threading.RLock()
        service = self

        class Handler(_Handler):
            gcs = service

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def options(self):
        """The keyword options for `reef.stores.open("gs://bucket/prefix", **options)`."""
        return {"endpoint": self.endpoint, "bearer_token": "t0ken"}

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def refuse(self, status, code="", *, after=False, times=1):
        """Respond to the next requests with this; with `after`, once they have taken effect."""
        self.refusals += [(status, code, after)] * times

    def sent(self, method):
        """The requests of this method so far."""
        return [request for request in self.requests if request.method == method]

    # --- responses: status, headers, body -------------------------------------------
    def respond(self, request):
        with self._lock:
            self.requests.append(request)
            if self.refusals:
                status, code, after = self.refusals.pop(0)
                if after:
                    self.act(request)
                return status, {}, _error(code)
            return self.act(request)

    def act(self, request):
        bucket, _, key = request.path.lstrip("/").partition("/")
        if request.path == "/token":
            return 200, {}, b'{"access_token": "t0ken", "expires_in": 3600, "token_type": "Bearer"}'
        if bucket != "bucket":
            return 404, {}, _error("NoSuchBucket")
        if request.headers.get("authorization") != "Bearer t0ken":
            return 401, {}, _error("AuthenticationRequired")
        if not key:
            return self.list(request.query)
        if "uploads" in request.query or "uploadId" in request.query:
            return self.upload(request, key)
        if request.method in ("GET", "HEAD"):
            return self.get(request, key)
        if request.method == "DELETE":
            return (204, {}, b"") if self.objects.pop(key, None) else _missing()
        if "compose" in request.query:
            return self.compose(request, key)
        return self.put(request, key)

    def get(self, request, key):
        found = self.objects.get(key)
        if found is None:
            return _missing()
        headers = {
            "ETag": f'"{found.generation:x}"',
            "x-goog-generation": str(found.generation),
            "Last-Modified": formatdate(found.modified_s, usegmt=True),
        }
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if asked is None:
            return 200, headers, found.body
        start, end = int(asked[1]), min(int(asked[2]) + 1, len(found.body))
        if start >= len(found.body):
            return 416, {}, _error("InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(found.body)}"
        return 206, headers, found.body[start:end]

    def put(self, request, key):
        body = request.body
        if "x-goog-copy-source" in request.headers:
            _, _, source = unquote(request.headers["x-goog-copy-source"]).lstrip("/").partition("/")
            if source not in self.objects:
                return _missing()
            body = self.objects[source].body
        if not self.holds(request, key):
            return 412, {}, _error("PreconditionFailed")
        result = b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>"
        return 200, self.store(key, body, request), result

    def holds(self, request, key):
        wanted = request.headers.get("x-goog-if-generation-match")
        found = self.objects.get(key)
        return wanted is None or int(wanted) == (found.generation if found else 0)

    def store(self, key, body, request):
        generation = next(self._generations)
        self.objects[key] = Stored(body, generation, storage_class=_class(request))
        return {"ETag": f'"{generation:x}"', "x-goog-generation": str(generation)}

    def compose(self, request, key):
        sources = [
            (one.findtext("Name"), one.findtext("Generation"))
            for one in ElementTree.fromstring(request.body).findall("Component")
        ]
        if not 1 <= len(sources) <= COMPOSE_MAX:
            return 400, {}, _error("InvalidArgument")
        for name, generation in sources:
            found = self.objects.get(name)
            if found is None or generation not in (None, str(found.generation)):
                return _missing()
            if found.storage_class != _class(request):
                return 400, {}, _error("InvalidArgument")
        if not self.holds(request, key):
            return 412, {}, _error("PreconditionFailed")
        body = b"".join(self.objects[name].body for name, _ in sources)
        return 200, self.store(key, body, request), b""

    def upload(self, request, key):
        if "uploads" in request.query:
            upload_id = f"upload-{next(self._generations)}"
            self.uploads[upload_id] = {}
            self.begun[upload_id] = request
            text = f"<UploadId>{upload_id}</UploadId>"
            result = f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>"
            return 200, {}, result.encode()
        upload_id = request.query["uploadId"]
        if upload_id not in self.uploads:
            return 404, {}, _error("NoSuchUpload")
        if request.method == "PUT":
            number = int(request.query["partNumber"])
            self.uploads[upload_id][number] = request.body
            return 200, {"ETag": f'"part-{number}"'}, b""
        parts = self.uploads.pop(upload_id)
        if request.method == "DELETE":
            return 204, {}, b""
        body = b"".join(parts[number] for number in sorted(parts))
        made = self.store(key, body, self.begun[upload_id])
        text = "<Bucket>bucket</Bucket><Key>k</Key><ETag>x</ETag>"
        done = f"<CompleteMultipartUploadResult>{text}</CompleteMultipartUploadResult>"
        return 200, made, done.encode()

    def list(self, query):
        prefix = query.get("prefix", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        page, more = keys[:1000], len(keys) > 1000
        contents = "".join(map(self._entry, page))
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        result = f"<ListBucketResult>{contents}{token}</ListBucketResult>"
        return 200, {}, result.encode()

    def _entry(self, key):
        found = self.objects[key]
        return (
            f"<Contents><Key>{escape(key)}</Key><Size>{len(found.body)}</Size>"
            f'<ETag>"{found.generation:x}"</ETag>'
            f"<LastModified>{_iso(found.modified_s)}</LastModified></Contents>"
        )


class _Handler(http.server.BaseHTTPRequestHandler):
    gcs: GcsService
    protocol_version = "HTTP/1.1"
    timeout = 300

    def respond(self):
        parts = urlsplit(self.path)
        query = {
            name: values[0]
            for name, values in parse_qs(parts.query, keep_blank_values=True).items()
        }
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        sent = Sent(self.command, unquote(parts.path), query, headers, body)
        status, headers, content = self.gcs.respond(sent)
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if status != 304:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD" and status != 304:
                self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = respond  # noqa: N815 - the names it is called by

    def log_message(self, *words):
        """Say nothing."""


def _iso(unix_s):
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _class(request):
    return request.headers.get("x-goog-storage-class", "STANDARD")


def _missing():
    return 404, {}, _error("NoSuchKey")


def _error(code):
    return f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
