/* The few functions of libcuda.so.1 that matter; build.py adds all others that torch and Triton ask
   for. A module is a cubin, which says how many registers its kernel takes and spills. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static char context[64];
struct kernel { int registers, local_bytes; char name[]; };

/* of device.so, which is preloaded */
extern int cudaDeviceGetAttribute(int *out, int attribute, int device);
extern int cudaGetDevice(int *out);
extern int cudaSetDevice(int device);
extern void fake_launch(const char *name);

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0, *active = 1;
  return 0;
}
int cuDeviceGet(int *out, int index) { *out = index; return 0; }
int cuDeviceGetCount(int *out) { *out = 8; return 0; }
int cuDriverGetVersion(int *out) { *out = 13000; return 0; }
int cuDevicePrimaryCtxRetain(void **out) { *out = context; return 0; }
int cuCtxGetCurrent(void **out) { *out = context; return 0; }
int cuCtxGetDevice(int *out) { return cudaGetDevice(out); }
int cuDeviceGetAttribute(int *out, int attribute, int device) { /* numbered as the runtime's */
  return cudaDeviceGetAttribute(out, attribute, device);
}
int cuGetErrorString(int error, const char **out) { *out = "fake"; return 0; }
int cuPointerGetAttribute(void *out, int attribute, void *p) { *(void **)out = p; return 0; }

/* modules and kernels */
int cuModuleLoadData(void **out, const void *cubin) { *out = (void *)cubin; return 0; }
int cuModuleLoad(void **out, const char *path) {
  struct stat file;
  int fd = open(path, O_RDONLY);
  if (fd < 0 || fstat(fd, &file)) return 301; /* CUDA_ERROR_FILE_NOT_FOUND */
  *out = mmap(0, file.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
  close(fd);
  return 0;
}
int cuModuleGetFunction(void **out, void *module, const char *name) {
  Elf64_Ehdr *elf = module;
  Elf64_Shdr *sections = module + elf->e_shoff;
  const char *names = module + sections[elf->e_shstrndx].sh_offset;
  struct kernel *kernel = calloc(1, sizeof *kernel + strlen(name) + 1);
  strcpy(kernel->name, name);
  for (int i = 0; i < elf->e_shnum; i++) {
    if (strcmp(names + sections[i].sh_name, ".nv.info")) continue;
    unsigned *p = module + sections[i].sh_offset, *end = p + sections[i].sh_size / 4;
    for (; p + 2 < end; p++) { /* records of kind, symbol, value */
      if (*p == 0x00082f04) kernel->registers = p[2];
      if (*p == 0x00081104 && p[2] > kernel->local_bytes) kernel->local_bytes = p[2]; /* frame */
    }
  }
  *out = kernel;
  return kernel->registers ? 0 : 500; /* CUDA_ERROR_NOT_FOUND */
}
int cuFuncGetAttribute(int *out, int attribute, struct kernel *kernel) {
  switch (attribute) {
    case 0: *out = 1024; break; /* CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK */
    case 3: *out = kernel->local_bytes; break; /* ..._LOCAL_SIZE_BYTES */
    case 4: *out = kernel->registers; break; /* ..._NUM_REGS */
    default: *out = 0;
  }
  return 0;
}
int cuLaunchKernel(struct kernel *kernel) { fake_launch(kernel->name); return 0; }
int cuLaunchCooperativeKernel(struct kernel *kernel) { fake_launch(kernel->name); return 0; }
int cuLaunchKernelEx(const void *config, struct kernel *kernel) {
  fake_launch(kernel->name);
  return 0;
}
