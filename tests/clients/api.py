"""A plain HTTP client for the gateway on Python's standard library."""
import http.client
import json
from urllib.parse import urlsplit

ENDED = {"succeeded", "failed", "canceled", "expired", "rejected"}


class Response:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json()["error"]

    def __repr__(self):
        return f"{self.status} {self.body[:400]!r}"


class Event:
    def __init__(self, id, type, data):
        self.id, self.type, self.data = id, type, data

    @property
    def unit(self):
        return self.data["unit"]

    @property
    def ends_job(self):
        return self.type in ENDED and self.data.get("unit") is None

    def __repr__(self):
        return f"<{self.id} {self.type} {self.data}>"


class EventStream:
    """Iterates over the events of one connection. May be closed at any time."""

    def __init__(self, connection, response):
        self.connection, self.response = connection, response

    def __iter__(self):
        fields, data = {}, []
        for line in self.response:
            line = line.decode().rstrip("\n")
            if not line:
                if data:
                    yield Event(fields.get("id"), fields.get("event", "message"), json.loads("\n".join(data)))
                fields, data = {}, []
            elif line.startswith("data: "):
                data.append(line[6:])
            elif not line.startswith(":"):
                name, _, value = line.partition(": ")
                fields[name] = value

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.response.close()
        self.connection.close()


class Client:
    def __init__(self, url, key=None, timeout=60):
        self.host = urlsplit(url).netloc
        self.key, self.timeout = key, timeout

    def _send(self, method, path, body, headers):
        headers = dict(headers or {})
        if self.key:
            headers.setdefault("Authorization", "Bearer " + self.key)
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
            headers.setdefault("Content-Type", "application/json")
        if isinstance(body, str):
            body = body.encode()
        if path.startswith("http"):
            path = path.split(self.host, 1)[1]
        connection = http.client.HTTPConnection(self.host, timeout=self.timeout)
        connection.request(method, path, body, headers)
        return connection, connection.getresponse()

    def request(self, method, path, body=None, headers=None):
        connection, response = self._send(method, path, body, headers)
        out = Response(response.status, response.headers, response.read())
        connection.close()
        return out

    def get(self, path, **headers):
        return self.request("GET", path, headers=headers)

    def submit(self, prompt="a red circle", headers=None, **fields):
        """Submits a job by POST /v1/jobs and returns its id."""
        response = self.request("POST", "/v1/jobs", {"prompt": prompt, **fields}, headers)
        assert response.status == 202, response
        return response.json()["id"]

    def job(self, id):
        response = self.get("/v1/jobs/" + id)
        assert response.status == 200, response
        return response.json()

    def cancel(self, id):
        return self.request("DELETE", "/v1/jobs/" + id)

    def events(self, id, after=None, progress=False):
        headers = {"Last-Event-ID": after} if after else {}
        connection, response = self._send("GET", f"/v1/jobs/{id}/events{'?progress=true' if progress else ''}", None, headers)
        assert response.status == 200, Response(response.status, response.headers, response.read())
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return EventStream(connection, response)

    def all_events(self, after=None, query=""):
        connection, response = self._send("GET", "/v1/events" + query, None, {"Last-Event-ID": after} if after else {})
        assert response.status == 200, Response(response.status, response.headers, response.read())
        return EventStream(connection, response)

    def wait_event(self, id, wanted):
        """Returns the first event of the type `wanted`, or for which the function `wanted` is true."""
        match = wanted if callable(wanted) else lambda e: e.type == wanted
        with self.events(id) as stream:
            for event in stream:
                if match(event):
                    return event
                assert not event.ends_job, f"job {id} ended while waiting for {wanted}: {event}"
        raise AssertionError(f"the stream of job {id} ended before {wanted}")

    def wait(self, id):
        """Waits for the end of the job and returns its record."""
        with self.events(id) as stream:
            for event in stream:
                if event.ends_job:
                    break
        job = self.job(id)
        assert job["state"] in ENDED, job
        return job
