"""ON WHAT: streams, events and storage, on the CPU and on everything shaped like CUDA."""
