"""How ranks communicate: meshes, collectives per backend, agreement between ranks."""
