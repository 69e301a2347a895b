/* CUDA's runtime, cuBLAS and NCCL for a GPU that computes nothing: kernels are counted and not run.

   Its memory is addresses without contents, so that a model may be larger than this machine. A copy
   to the host brings zeros, or what was copied there since the last kernel, as DDP does to agree
   on something; one byte, which is a flag such as the result of `all()`, is true. Every other
   function of those libraries that torch calls does nothing and returns success: see build.py. */

#define _GNU_SOURCE
#include <driver_types.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DEVICES 8
#define REGION (1UL << 42) /* bytes of addresses, of the device and of page-locked memory */

/* Called at each synchronization and copy: "synchronize", "to host", "from host", … */
static void (*listener)(const char *kind, size_t bytes);
static size_t total = 80000000000UL, used, launches, allocations, frees;
static _Thread_local int device;
static char *device_memory, *host_memory;
static size_t device_end, host_end;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block { void *start; size_t size; struct block *next; } *blocks;

static int failure; /* of the device: what each call that it has to answer returns */
void fake_fail(int error) { failure = error; }
cudaError_t cudaGetLastError(void) { return failure; }
cudaError_t cudaPeekAtLastError(void) { return failure; }
cudaError_t cudaEventQuery(cudaEvent_t e) { return failure; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return failure; }

void fake_listen(void (*f)(const char *, size_t)) { listener = f; }
void fake_set_memory(size_t bytes) { total = bytes; }
size_t fake_launches(void) { return launches; }
size_t fake_allocations(void) { return allocations; }
size_t fake_frees(void) { return frees; } /* each of which waits for the device */
static void tell(const char *kind, size_t bytes) { if (listener) listener(kind, bytes); }

/* Called with the name of each kernel that comes from a cubin, as Triton's do. */
static void (*launch_listener)(const char *name);
void fake_listen_to_launches(void (*f)(const char *)) { launch_listener = f; }
void fake_launch(const char *name) {
  launches++;
  if (launch_listener) launch_listener(name);
}

__attribute__((constructor)) static void reserve(void) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  device_memory = mmap(0, REGION, PROT_NONE, flags, -1, 0);
  host_memory = mmap(0, REGION, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (device_memory == MAP_FAILED || host_memory == MAP_FAILED) abort();
}
static int on_device(const void *p) {
  return (char *)p >= device_memory && (char *)p < device_memory + REGION;
}
static int pinned(const void *p) {
  return (char *)p >= host_memory && (char *)p < host_memory + REGION;
}

/* memory */
cudaError_t cudaMalloc(void **out, size_t size) {
  pthread_mutex_lock(&lock);
  int fits = used + size <= total;
  if (fits) {
    *out = device_memory + device_end;
    device_end += (size + 4095) & ~4095UL;
    used += size, allocations++;
    struct block *block = malloc(sizeof *block);
    *block = (struct block){*out, size, blocks};
    blocks = block;
  }
  pthread_mutex_unlock(&lock);
  return fits ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *p) {
  if (!p) return cudaSuccess;
  pthread_mutex_lock(&lock);
  for (struct block **at = &blocks; *at; at = &(*at)->next)
    if ((*at)->start == p) {
      struct block *block = *at;
      used -= block->size, frees++;
      *at = block->next;
      free(block);
      break;
    }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *all) {
  *free = total - used, *all = total;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) {
  pthread_mutex_lock(&lock);
  *out = host_memory + host_end;
  host_end += (size + 4095) & ~4095UL;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p) {
  memset(out, 0, sizeof *out);
  out->type = on_device(p) ? cudaMemoryTypeDevice
            : pinned(p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  out->device = device;
  out->devicePointer = out->hostPointer = (void *)p;
  return cudaSuccess;
}
static struct { const void *at; size_t size, launches; char bytes[4096]; } newest[16];
static cudaError_t copy(void *to, const void *from, size_t size) {
  static int next;
  if (failure) return failure;
  if (on_device(to) && on_device(from)) return cudaSuccess;
  if (on_device(to)) {
    tell(pinned(from) ? "from host" : "from pageable host", size);
    if (size > sizeof newest->bytes) return cudaSuccess;
    next = (next + 1) % 16;
    newest[next].at = to, newest[next].size = size, newest[next].launches = launches;
    memcpy(newest[next].bytes, from, size);
    return cudaSuccess;
  }
  tell(pinned(to) ? "to host" : "to pageable host", size);
  char *pages = (char *)(((size_t)to + 4095) & ~4095UL);
  size_t there = (char *)to + size - pages;
  if (pinned(to) && size > 1 << 20) { /* zeros that take no memory */
    madvise(pages, there & ~4095UL, MADV_DONTNEED);
    memset(to, 0, pages - (char *)to);
    memset(pages + (there & ~4095UL), 0, there & 4095);
  } else {
    memset(to, size == 1, size);
  }
  for (int i = 1; i <= 16 && size > 1; i++) { /* the oldest first */
    int k = (next + i) % 16;
    if (newest[k].at == from && newest[k].size == size && newest[k].launches == launches)
      memcpy(to, newest[k].bytes, size);
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream) { return copy(to, from, size); }
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  tell("synchronize", 0);
  return copy(to, from, size);
}
cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
  return cudaMalloc(out, 4096);
}

/* synchronization */
cudaError_t cudaDeviceSynchronize(void) { tell("synchronize", 0); return failure; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { tell("synchronize", 0); return failure; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { tell("synchronize", 0); return failure; }

/* kernels */
static struct { const char *word; size_t launches; int n; const void *kernels[4096]; } named[] = {
  {"flash_fwd_kernel"}, {"flash_bwd_dq_dk_dv"}}; /* of flash attention */
size_t fake_flash_forward(void) { return named[0].launches; }
size_t fake_flash_backward(void) { return named[1].launches; }
void __cudaRegisterFunction(void **binary, const char *f, char *g, const char *name) {
  for (int i = 0; i < 2; i++)
    if (strstr(name, named[i].word) && named[i].n < 4096) named[i].kernels[named[i].n++] = f;
}
static cudaError_t launch(const void *f) {
  if (failure) return failure;
  launches++;
  for (int i = 0; i < 2; i++)
    for (int k = 0; k < named[i].n; k++) named[i].launches += named[i].kernels[k] == f;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(void **out, const void *f) { *out = (void *)f; return cudaSuccess; }
cudaError_t __cudaLaunchKernel(const void *f) { return launch(f); }
cudaError_t cudaLaunchKernel(const void *f) { return launch(f); }
cudaError_t cudaLaunchKernelExC(const void *config, const void *f) { return launch(f); }
unsigned __cudaPushCallConfiguration(void) { return 0; }
cudaError_t __cudaPopCallConfiguration(void) { return cudaSuccess; }
void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *f) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024, out->numRegs = 32;
  out->ptxVersion = out->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out) {
  *out = 2;
  return cudaSuccess;
}

/* the device */
cudaError_t cudaGetDevice(int *out) { *out = device; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) { device = d; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *out) { *out = DEVICES; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *out) { *out = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *out) { *out = 13000; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *low, int *high) {
  *low = 0, *high = -5;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  p->major = 9, p->multiProcessorCount = 132, p->totalGlobalMem = total, p->warpSize = 32;
  p->maxThreadsPerMultiProcessor = 2048, p->maxThreadsPerBlock = 1024;
  p->maxBlocksPerMultiProcessor = 32, p->regsPerMultiprocessor = p->regsPerBlock = 65536;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472, p->l2CacheSize = 52428800;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->textureAlignment = 512, p->memoryBusWidth = 5120;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int d) {
  struct cudaDeviceProp p;
  cudaGetDeviceProperties(&p, d);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *out = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *out = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *out = p.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxGridDimX: *out = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *out = p.maxGridSize[1]; break;
    case cudaDevAttrWarpSize: *out = 32; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *out = 2048; break;
    case cudaDevAttrMaxThreadsPerBlock: *out = 1024; break;
    default: *out = 0;
  }
  return cudaSuccess;
}

/* handles: never dereferenced */
static void *handle(void) { return malloc(64); }
#define MAKES_HANDLE(name) int name(void **out) { *out = handle(); return 0; }
MAKES_HANDLE(cudaStreamCreate)
MAKES_HANDLE(cudaStreamCreateWithFlags)
MAKES_HANDLE(cudaStreamCreateWithPriority)
MAKES_HANDLE(cudaEventCreate)
MAKES_HANDLE(cudaEventCreateWithFlags)
MAKES_HANDLE(cublasCreate_v2)
MAKES_HANDLE(cublasLtCreate)
MAKES_HANDLE(cublasLtMatmulDescCreate)
MAKES_HANDLE(cublasLtMatmulPreferenceCreate)
MAKES_HANDLE(cublasLtMatrixLayoutCreate)
int ncclCommRegister(void *comm, void *p, size_t n, void **out) { *out = handle(); return 0; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms) { *ms = 1; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, int *out) { *out = 0; return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, int *out) { *out = 0; return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *out) { *out = 0; return cudaSuccess; }
static int driver_call(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version,
                                             unsigned long long flags, int *found) {
  *out = (void *)driver_call;
  if (found) *found = 0;
  return cudaSuccess;
}

/* libraries */
int cublasGetMathMode(void *h, int *out) { *out = 0; return 0; }
int cublasGetPointerMode_v2(void *h, int *out) { *out = 0; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *op, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, void *out, int *found) {
  memset(out, 0, 96 * (size_t)wanted); /* cublasLtMatmulHeuristicResult_t: success */
  *found = 1;
  return 0;
}
struct comm { int ranks, rank; };
static int make_comm(struct comm **out, int ranks, int rank) {
  *out = malloc(sizeof **out);
  **out = (struct comm){ranks, rank};
  return 0;
}
typedef struct { char bytes[128]; } id; /* ncclUniqueId */
int ncclCommInitRank(struct comm **out, int n, id i, int rank) { return make_comm(out, n, rank); }
int ncclCommInitRankConfig(struct comm **out, int n, id i, int rank, void *config) {
  return make_comm(out, n, rank);
}
int ncclCommInitRankScalable(struct comm **out, int n, int rank, int ids, void *i, void *config) {
  return make_comm(out, n, rank);
}
int ncclCommSplit(struct comm *comm, int color, int key, struct comm **out) { /* of all ranks */
  return make_comm(out, comm->ranks, comm->rank);
}
int ncclCommCount(struct comm *comm, int *out) { *out = comm->ranks; return 0; }
int ncclCommUserRank(struct comm *comm, int *out) { *out = comm->rank; return 0; }
int ncclGetVersion(int *out) { *out = 22700; return 0; }
int ncclCommGetAsyncError(void *comm, int *out) { *out = 0; return 0; }
const char *cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorMemoryAllocation ? "out of memory" : "an error of the fake device";
}
const char *cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
const char *ncclGetErrorString(int e) { return "an error of the fake NCCL"; }
const char *ncclGetLastError(void *comm) { return ""; }
