"""The `fullshard` command. Its dependencies are the extra `cli`; the library needs none of them."""
