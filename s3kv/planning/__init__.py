"""Pure decisions: events in, instructions out. No asyncio, threads, clock, network or torch."""
