"""A reference accelerator for tests: a PrivateUse1 device in C++ whose kernels run later, on threads of the CPU.

What is wrong on a GPU is wrong here, too: the host cannot read the device's memory, kernels run after the call that
launched them returned, streams are not ordered among each other, and a collective that never ends lets the host wait.
`build.py` compiles it, `device.py` registers it as "refdev" with the collectives "refccl".
"""
