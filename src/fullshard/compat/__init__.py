"""What frameworks and torch's own functions ask of modules that torch's FSDP has sharded."""
