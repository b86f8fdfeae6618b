// Keeps the page live. The proxy sends the parts that have changed as HTML that it has escaped; here they are compared
// with what is shown, so that focus, selection and opened details stay where they are.
"use strict";
(() => {
  const RETRY_MS = 10000; // after a refusal, which an EventSource does not try again by itself
  const live = document.getElementById("live");
  const pause = document.getElementById("pause");
  let source = null;
  let timer = 0;
  let paused = false;

  function say(state, text) {
    live.className = `state-${state}`;
    if (live.textContent !== text) live.textContent = text;
  }

  function attributes(from, to) {
    for (const { name } of [...from.attributes]) {
      if (!to.hasAttribute(name) && name !== "open") from.removeAttribute(name);
    }
    for (const { name, value } of to.attributes) {
      if (from.getAttribute(name) !== value) from.setAttribute(name, value);
    }
  }

  const alike = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && (a.id || "") === (b.id || "");

  function change(from, to) {
    if (from.isEqualNode(to)) return;
    if (from.nodeType === Node.TEXT_NODE) {
      from.nodeValue = to.nodeValue;
      return;
    }
    attributes(from, to);
    children(from, to);
  }

  // Nodes with an id are found again where others came or went before them; the rest goes by position.
  function children(from, to) {
    const known = new Map([...from.children].filter((x) => x.id).map((x) => [x.id, x]));
    let at = from.firstChild;
    const drop = () => {
      const next = at.nextSibling;
      known.delete(at.id);
      at.remove();
      at = next;
    };
    for (const next of [...to.childNodes]) {
      const old = next.id && known.get(next.id);
      while (old && at !== old) drop();
      if (at && alike(at, next)) {
        const after = at.nextSibling;
        known.delete(at.id);
        change(at, next);
        at = after;
      } else {
        from.insertBefore(next, at);
      }
    }
    while (at) drop();
  }

  function show(id, html) {
    const part = document.getElementById(id);
    if (!part) return;
    const focused = document.activeElement;
    const fresh = document.createElement("template");
    fresh.innerHTML = html;
    children(part, fresh.content);
    // A row that held the focus has left the table: go on from the heading above it.
    if (!focused.isConnected) document.getElementById(`h-${id}`).focus({ preventScroll: true });
  }

  function close() {
    clearTimeout(timer);
    if (source) source.close();
    source = null;
  }

  function open() {
    close();
    if (paused || document.hidden) return;
    source = new EventSource("events");
    source.onopen = () => say("live", "Live");
    source.onmessage = (event) => {
      for (const [id, html] of Object.entries(JSON.parse(event.data))) show(id, html);
    };
    source.onerror = () => {
      say("lost", "Connection lost, trying again");
      if (source && source.readyState === EventSource.CLOSED) {
        say("lost", "Not live: refused, trying again soon");
        timer = setTimeout(open, RETRY_MS);
      }
    };
  }

  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Resume" : "Pause";
    if (paused) {
      close();
      say("static", "Paused");
    } else {
      open();
    }
  });
  document.addEventListener("visibilitychange", open);
  open();
})();
