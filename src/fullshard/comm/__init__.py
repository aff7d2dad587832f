"""HOW: meshes and process groups, collectives per backend, agreement between ranks."""
