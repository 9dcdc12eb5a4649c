/* Stands in for the CUDA driver where there is no GPU: enough for compilers to see one H200. */

enum { OK = 0, SM_COUNT = 16, COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76, SHARED_OPT_IN = 97 };

static int some_object;

int cuInit(unsigned flags) { return OK; }
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case SM_COUNT: *value = 132; break;
    case COMPUTE_MAJOR: *value = 9; break;
    case COMPUTE_MINOR: *value = 0; break;
    case SHARED_OPT_IN: *value = 232448; break;
    default: *value = 1;
  }
  return OK;
}
int cuCtxGetCurrent(void **context) { *context = &some_object; return OK; }
int cuCtxGetDevice(int *device) { *device = 0; return OK; }
int cuCtxSetCurrent(void *context) { return OK; }
int cuGetErrorName(int error, const char **name) { *name = "STAND_IN"; return OK; }
int cuGetErrorString(int error, const char **text) { *text = "no driver here"; return OK; }
int cuModuleLoadData(void **module, const void *image) { *module = &some_object; return OK; }
int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *names,
                       void **values) {
  *module = &some_object;
  return OK;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = &some_object;
  return OK;
}
int cuModuleUnload(void *module) { return OK; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 0; return OK; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return OK; }
