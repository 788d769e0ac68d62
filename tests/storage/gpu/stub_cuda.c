// A libcuda.so.1 without the function that looks up all others, like a driver before CUDA 12 and the toolkit's stub.
int cuInit(unsigned flags);
int cuInit(unsigned flags) {
  return flags == 0 ? 34 : 1;
}
