"""Django's admin over one shard."""

from __future__ import annotations

from functools import wraps
from typing import Any

from django.contrib.admin import AdminSite
from django.http import HttpRequest, HttpResponseBase
from django.template.response import SimpleTemplateResponse

from shardids.django.choice import in_shard

__all__ = ["ShardAdminSite"]


class ShardAdminSite(AdminSite):
    """An admin site whose sharded models are those of one shard; other models are where they always are::

        site = ShardAdminSite(5)
        site.register(Question)
        urlpatterns = [path("shards/5/", site.urls)]

    Args:
        shard: the shard. :meth:`shard_of` may be overridden, to choose it by the request.
        name: the site's name, for ``reverse``; by default ``shard_admin_5``.
    """

    def __init__(self, shard: int, name: str | None = None) -> None:
        super().__init__(name or f"shard_admin_{shard}")
        self.shard = shard
        self.site_header = self.site_title = f"Shard {shard}"

    def shard_of(self, request: HttpRequest) -> int:
        """Return the shard that a request is about; it is asked once the user may see the site."""
        return self.shard

    def admin_view(self, view: Any, cacheable: bool = False) -> Any:
        """Wrap a view of the admin: it asks, and its page is rendered, in the shard."""

        @wraps(view)
        def in_its_shard(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            with in_shard(shard=self.shard_of(request)):
                response: HttpResponseBase = view(request, *args, **kwargs)
                if isinstance(response, SimpleTemplateResponse):
                    # Lists and choices are read while it is rendered.
                    response.render()
                return response

        return super().admin_view(in_its_shard, cacheable)
