"""The `fullshard` command. Its dependencies are the extra `cli`; the library does not need them."""
