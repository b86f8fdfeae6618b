"""What a request is within its session: the main line's next turn, or a question beside it."""

from __future__ import annotations

from policies.types import Match
from proxy.api.read import ModelRequest
from proxy.lines import Found
from proxy.metrics import Kind
from proxy.service import Service


def kind_of(service: Service, request: ModelRequest) -> Kind:
    """Label `kind`: a request without tools, in a session that has them, is a title, a summary or the like."""
    if request.door == "chat" and not request.body.get("tools") and service.lines.has_tools(request.who):
        return "side"
    return request.kind


def apart(found: Found, kind: Kind) -> Found:
    """A question on the side with a base of its own is no later state of the main line, and must not take its place."""
    return Found(None, Match.NEW) if kind == "side" and found.match is Match.BASE else found
