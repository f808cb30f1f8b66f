"""A store inside of another one, below a prefix: two stores that crash as one."""

from dataclasses import replace

from reef.stores import Wrapper


class Prefixed(Wrapper):
    """All keys of another store that begin with a prefix, without it."""

    def __init__(self, inner, prefix="set/"):
        super().__init__(inner)
        self.prefix = prefix

    def __reduce__(self):
        return Prefixed, (self.inner, self.prefix)

    def get_tagged(self, key):
        return self.inner.get_tagged(self.prefix + key)

    def get_range(self, key, start, end):
        return self.inner.get_range(self.prefix + key, start, end)

    def head(self, key):
        return self._short(self.inner.head(self.prefix + key))

    def list(self, prefix="", start_after=""):
        after = self.prefix + start_after if start_after else ""
        return map(self._short, self.inner.list(self.prefix + prefix, after))

    def put(self, key, body):
        return self.inner.put(self.prefix + key, body)

    def create(self, key, body):
        return self.inner.create(self.prefix + key, body)

    def replace(self, key, body, tag):
        return self.inner.replace(self.prefix + key, body, tag)

    def upload(self, key, parts):
        return self.inner.upload(self.prefix + key, parts)

    def copy(self, source, target):
        self.inner.copy(self.prefix + source, self.prefix + target)

    def delete_many(self, keys):
        self.inner.delete_many([self.prefix + key for key in keys])

    def _short(self, info):
        return replace(info, key=info.key.removeprefix(self.prefix))
