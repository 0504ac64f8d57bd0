// A block of 16 values in NVFP4 with NVIDIA's own conversions (cuda_fp8.h, cuda_fp4.h): what sgl_kernel's
// torch reference must give bit for bit. APPROXIMATE: with the reciprocals that FlashInfer takes by default.
//
//     nvcc -shared -Xcompiler -fPIC -arch=sm_90a -o nvfp4_recipe.so benchmark/h200/nvfp4_recipe.cu
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include <cfloat>
#include <cmath>
#include <cstdint>

template <bool APPROXIMATE>
__host__ __device__ float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  if constexpr (APPROXIMATE) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
  return __fdiv_rn(1.0f, x);
#else
  return 1.0f / x;
#endif
}

template <bool APPROXIMATE>
__host__ __device__ void quantise_block(const float* x, float by, uint8_t* codes, uint8_t* scale) {
  float most = 0.0f;
  for (int i = 0; i < 16; ++i) most = fmaxf(most, fabsf(x[i]));
  const float wanted = APPROXIMATE ? by * (most * reciprocal<true>(6.0f)) : most * (by * (1.0f / 6.0f));
  const __nv_fp8_e4m3 rounded(wanted);
  *scale = rounded.__x;
  float times = 0.0f;
  if (most != 0.0f) {
    times = reciprocal<APPROXIMATE>(static_cast<float>(rounded) * reciprocal<APPROXIMATE>(by));
    if (!APPROXIMATE) times = fminf(times, FLT_MAX);
  }
  for (int i = 0; i < 16; i += 2) {
    const uint8_t low = __nv_cvt_float_to_fp4(x[i] * times, __NV_E2M1, cudaRoundNearest);
    const uint8_t high = __nv_cvt_float_to_fp4(x[i + 1] * times, __NV_E2M1, cudaRoundNearest);
    codes[i / 2] = static_cast<uint8_t>(low | (high << 4));
  }
}

template <bool APPROXIMATE>
__global__ void quantise_kernel(const float* x, float by, uint8_t* codes, uint8_t* scale, int blocks) {
  const int block = blockIdx.x * blockDim.x + threadIdx.x;
  if (block < blocks) quantise_block<APPROXIMATE>(x + 16 * block, by, codes + 8 * block, scale + block);
}

extern "C" void quantise_on_host(const float* x, float by, uint8_t* codes, uint8_t* scale, int blocks) {
  for (int block = 0; block < blocks; ++block) {
    quantise_block<false>(x + 16 * block, by, codes + 8 * block, scale + block);
  }
}

// Of device pointers, on the default stream; waits. Returns CUDA's error code.
extern "C" int quantise_on_device(const float* x, float by, uint8_t* codes, uint8_t* scale, int blocks,
                                  int approximate) {
  const int threads = 128, grid = (blocks + threads - 1) / threads;
  if (approximate) {
    quantise_kernel<true><<<grid, threads>>>(x, by, codes, scale, blocks);
  } else {
    quantise_kernel<false><<<grid, threads>>>(x, by, codes, scale, blocks);
  }
  const cudaError_t launched = cudaGetLastError();
  return static_cast<int>(launched != cudaSuccess ? launched : cudaDeviceSynchronize());
}
