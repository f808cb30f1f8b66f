"""A store that counts requests."""

from reef.stores.wrappers.base import Hooked


class Requests(Hooked):
    """Counts requests."""

    def __init__(self, inner):
        super().__init__(inner)
        self.count = 0

    def around(self, request, send):
        self.count += 1
        return send(request)

    def around_list(self, request, send):
        self.count += 1
        return super().around_list(request, send)

    def cost(self, call):
        """Return how many requests a call sends."""
        before = self.count
        call()
        return self.count - before
