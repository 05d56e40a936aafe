# The CUDA language: wherever there is a CUDA compiler, so that the kernels are at least compiled.
include(CheckLanguage)
if(NOT HORNER_SANITIZED AND (TARGET torch::cuda OR HORNER_TESTS))
  check_language(CUDA)
endif()
if(CMAKE_CUDA_COMPILER)
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-virtual)  # without a torch to run them: that they compile
    if(TARGET torch::cuda)
      set(CMAKE_CUDA_ARCHITECTURES 80 90)
    endif()
  endif()
  set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O3")
  enable_language(CUDA)
  if(NOT TARGET torch::cuda AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    string(APPEND CMAKE_CUDA_FLAGS_RELWITHDEBINFO " --Ofast-compile=max")  # nothing runs them: an eighth of the time
  endif()
  find_package(CUDAToolkit REQUIRED)
endif()
if(CMAKE_CUDA_COMPILER AND TARGET torch::cuda)
  set(HORNER_CUDA ON)  # the kernels can be launched from torch
endif()
