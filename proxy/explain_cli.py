"""`slotkeeper explain`: why prompt tokens were processed again, asked of the running server."""

from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.text import Text

from proxy.config import load
from proxy.control import NoServer, call
from proxy.errors import StoreError
from proxy.shown import plain, print_json
from proxy.snapshots import AsJson, StateDir


def explain(
    request_id: Annotated[
        str, typer.Argument(help="a request's id, or the beginning of one", show_default=False, metavar="REQUEST_ID")
    ] = "",
    last: Annotated[
        int,
        typer.Option(
            help="how many requests with a cause or a compaction, the newest first", min=1, max=1000, metavar="N"
        ),
    ] = 10,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Show why prompt tokens were processed again. Where the prompt diverged, what it cost, what avoids it."""
    settings = load({"state_dir": state_dir} if state_dir else {})
    door = f"/explain/{quote(request_id, safe='')}" if request_id else f"/explain?last={last}"
    try:
        answer = call(settings.control_socket, "GET", door)
    except NoServer:
        raise StoreError(
            f"No Slotkeeper runs on {settings.state_dir}: texts are kept by the running server only. Start it, or name "
            "its state directory with --state-dir; for recorded requests see slotkeeper audit."
        ) from None
    if as_json:
        return print_json(answer)
    out = Console(highlight=False, soft_wrap=True)
    if not answer["requests"]:
        out.print("No request so far had to process tokens that an earlier prompt held.")
    for i, request in enumerate(answer["requests"]):
        out.print(*([""] if i else []), _told(request), sep="\n")


def _told(request: dict[str, Any]) -> Text:
    """One request in a few lines."""
    n_prompt = request["cache_n"] + request["prompt_n"]
    lines = [plain(f"{request['id']}  {n_prompt:,} prompt tokens, {request['cache_n']:,} from the cache", "bold")]
    if request["cause"] is None:
        lines.append(plain("  nothing was processed again that an earlier prompt held"))
    else:
        cost = f"{request['reprocessed']:,} tokens could have been reused"
        lines.append(plain(f"  cause      {request['cause']}: {cost}"))
    if request["repairs"]:
        lines.append(plain(f"  repaired   {', '.join(dict.fromkeys(request['repairs']))}"))
    if "outcome" in request["compaction"]:  # else something was tried in vain
        lines.append(plain(f"  compacted  {_compacted(request['compaction'])}"))
    found = request["divergence"]
    if "section" in found:
        lines += [plain(f"  diverges   {_place(found)}"), plain(f"  changed    {found['kind']}")]
    lines += [plain(f"  avoid it   {advice}") for advice in request["advice"]]
    shown, what = (request["tokens"], "tokens") if request["tokens"] else (request["texts"], "text  ")
    if shown:
        lines.append(plain(f"  {what} was {shown['shared']}") + plain(shown["old"], "red"))
        lines.append(plain(f"  {what} is  {shown['shared']}") + plain(shown["new"], "green"))
    return Text("\n").join(lines)


def _place(found: dict[str, Any]) -> str:
    """Section, message, path, character and token."""
    what = "tool" if found["section"] == "tools" else "message"
    message = "" if found["message"] is None else f" {what} {found['message']}"
    role = f" ({found['role']})" if found["role"] else ""
    token = "" if found["token"] is None else f", token {found['token']:,}"
    path = f" {found['path']}" if found["path"] else ""
    return f"in {found['section']}{message}{role}{path}, character {found['character']:,}{token}"


def _compacted(found: dict[str, Any]) -> str:
    """What took which messages' place, and what that came to."""
    span = " of messages {} to {}".format(found["messages"][0], found["messages"][1] - 1) if "messages" in found else ""
    when = ", in idle time, ahead of the next request" if found.get("ahead") else ""
    return f"{found['outcome']}{span}: about {found['after']:,} tokens instead of {found['before']:,}{when}"
