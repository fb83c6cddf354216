"""Engines as GPUs run them, on a CPU: vLLM's V2 model runner, and two steps at once. Installed by `make variants`.

V2 model runner    its kernels are written in Triton, and Triton's interpreter carries them out in NumPy, whatever
                   computes. vLLM wants a backend called `cpu` first; this package is one (`compiler`, `driver`), in
                   which nothing is compiled. Two kernels that the interpreter cannot carry out are replaced.
                   Where `TRITON_INTERPRET` is 1 and Triton is on the path.
two steps at once  the asynchronous scheduler, which vLLM switches off on CPUs. Where `TESTS_VARIANT` ends with
                   `async`.
"""
