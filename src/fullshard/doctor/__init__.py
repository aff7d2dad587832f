"""What a machine has, how fast it is, and what is wrong with it: `fullshard doctor`."""
