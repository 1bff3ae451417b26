"""The part by which NVIDIA's apex differs from other packages of that name; the kernels need nothing of it here."""
