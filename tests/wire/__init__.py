"""Real sockets: a client, the proxy, and a scripted engine, all on loopback."""
