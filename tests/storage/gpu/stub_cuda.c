// A libcuda.so.1 without the function that finds all others, as a driver before CUDA 12 and the toolkit's stub are.
int cuInit(unsigned flags);
int cuInit(unsigned flags) {
  return flags == 0 ? 34 : 1;
}
