"""When it happens: hooks, scheduler, and what builds them."""
