"""A GPU made of a C++ compiler: the kernels' source runs on the host. Every access is checked."""
