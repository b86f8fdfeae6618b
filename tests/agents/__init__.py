"""Real coding agents, installed and run headless against Slotkeeper, as the README says (make test-agents)."""
