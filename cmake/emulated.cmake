# The CUDA kernels on a CPU (tests/emulator): attn once more, from a copy in which they are C++, and tests that run them.
file(GLOB_RECURSE attn_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/attn/*.h ${CMAKE_SOURCE_DIR}/src/attn/*.cpp
     ${CMAKE_SOURCE_DIR}/src/attn/*.cu ${CMAKE_SOURCE_DIR}/src/attn/*.cuh)
set(emulator ${CMAKE_SOURCE_DIR}/tests/emulator)
set(copies ${CMAKE_BINARY_DIR}/emulated)
set(copied)
foreach(source ${attn_sources})
  if(NOT source MATCHES "/hopper/.*\\.cuh?$")
    string(REPLACE ${CMAKE_SOURCE_DIR}/src ${copies} copy ${source})
    list(APPEND copied ${copy})
  endif()
endforeach()
add_custom_command(OUTPUT ${copies}/made BYPRODUCTS ${copied} DEPENDS ${attn_sources} ${emulator}/transform.py
  COMMAND ${Python_EXECUTABLE} ${emulator}/transform.py ${CMAKE_SOURCE_DIR}/src/attn ${copies}/attn
  COMMAND ${CMAKE_COMMAND} -E touch ${copies}/made COMMENT "Copying the CUDA kernels for the emulator")
add_custom_target(emulated_sources DEPENDS ${copies}/made)

set(emulated_flags -O1 -g0 -ffp-contract=fast ${flags_avx2} -w)  # the CUDA compiler warns of the sources themselves


# The kernels: the same sources, once per dtype, as the CUDA compiler has them.
set(emulated_objects)
get_property(units GLOBAL PROPERTY HORNER_CUDA_KERNELS)
foreach(unit ${units})
  string(REGEX MATCH "^([^|]*)\\|([^|]*)\\|(.*)$" unit "${unit}")
  set(dtype ${CMAKE_MATCH_2})
  set(target emulated_${CMAKE_MATCH_1}${CMAKE_MATCH_2})
  string(REPLACE "|" ";" sources "${CMAKE_MATCH_3}")
  list(FILTER sources EXCLUDE REGEX "^hopper/")
  if(NOT sources)
    continue()
  endif()
  list(TRANSFORM sources PREPEND ${copies}/attn/kernels/cuda/)
  set_source_files_properties(${sources} PROPERTIES LANGUAGE CXX)
  add_library(${target} OBJECT ${sources})
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_compile_options(${target} PRIVATE ${emulated_flags} -x c++ -include ${emulator}/emulator.h)
  target_include_directories(${target} PRIVATE ${copies} ${emulator} ${CMAKE_SOURCE_DIR}/src)
  target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  if(dtype)
    target_compile_definitions(${target} PRIVATE HORNER_DTYPE=${dtype})
  endif()
  add_dependencies(${target} emulated_sources)
  list(APPEND emulated_objects $<TARGET_OBJECTS:${target}>)
endforeach()

# attn around them: the executions that launch them, the rest as it is. No kernels of the CPU but the portable ones.
get_target_property(sources horner_attn SOURCES)
list(FILTER sources INCLUDE REGEX "\\.cpp$")
list(FILTER sources EXCLUDE REGEX "cuda")
file(GLOB executions RELATIVE ${CMAKE_SOURCE_DIR}/src/attn CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/attn/exec/*cuda*.cpp)
list(REMOVE_ITEM executions exec/cuda_stub.cpp exec/hopper_cuda.cpp)
set(all ${sources} ${executions})
list(TRANSFORM all PREPEND ${copies}/attn/)
add_library(horner_attn_emulated STATIC ${all} ${emulator}/emulator.cpp ${emulator}/no_hopper.cpp ${emulated_objects}
            ${CMAKE_SOURCE_DIR}/src/instruments/verify.cpp)
foreach(isa portable avx2 avx512 avx512_bf16 amx)
  target_sources(horner_attn_emulated PRIVATE $<TARGET_OBJECTS:horner_attn_${isa}>)
endforeach()
target_include_directories(horner_attn_emulated BEFORE PUBLIC ${copies} ${emulator})
target_include_directories(horner_attn_emulated SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(horner_attn_emulated PUBLIC horner_core torch::cpu)
target_compile_options(horner_attn_emulated PRIVATE -w)
add_dependencies(horner_attn_emulated emulated_sources)
target_precompile_headers(horner_attn_emulated PRIVATE <ATen/ATen.h>)

add_executable(emulated_cuda_test tests/emulated_cuda_test.cpp)
target_link_libraries(emulated_cuda_test PRIVATE horner_attn_emulated GTest::gtest_main)
target_precompile_headers(emulated_cuda_test REUSE_FROM horner_attn_emulated)
