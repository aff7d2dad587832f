"""`fullshard train` and its kin: an application that uses public names of the library only."""
