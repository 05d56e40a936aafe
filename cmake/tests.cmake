# The tests: programs of GoogleTest, tools that Python tests start, Python tests.
find_package(GTest REQUIRED)
set(tests executions_test mutants_test state_test formulas_test identities_test errors_test adversarial_test fused_cpu_test fused_cuda_test
    delta_cuda_test gradients_cuda_test special_cuda_test safetensors_test svg_test tasks_test text_test parts_test checkpoint_test integrity_test product_test diag_test diag_model_test
    diag_claims_test dropout_test packing_test)
if(HORNER_SANITIZED)  # what is built there twice as slowly: the files and numbers that come from outside, and the kernels
  list(REMOVE_ITEM tests adversarial_test integrity_test tasks_test diag_test diag_model_test diag_claims_test fused_cuda_test delta_cuda_test gradients_cuda_test special_cuda_test mutants_test dropout_test formulas_test)
  set_target_properties(horner_train horner_study horner_diag PROPERTIES EXCLUDE_FROM_ALL ON)
endif()
foreach(name ${tests})
  add_executable(${name} tests/${name}.cpp)
  target_link_libraries(${name} PRIVATE horner_instruments horner_report horner_text GTest::gtest_main)
  if(name MATCHES "^(parts|product|checkpoint)_test$")
    target_link_libraries(${name} PRIVATE horner_nn)
  elseif(name STREQUAL integrity_test)
    target_link_libraries(${name} PRIVATE horner_train)
  elseif(name STREQUAL tasks_test)
    target_link_libraries(${name} PRIVATE horner_study)
  elseif(name MATCHES "^diag_")
    target_link_libraries(${name} PRIVATE horner_diag)
  endif()
  if(NOT name MATCHES "^(svg|text)_test$")  # the others include torch
    target_precompile_headers(${name} REUSE_FROM horner_attn)
  elseif(HORNER_SANITIZED AND name STREQUAL svg_test)
    target_compile_options(${name} PRIVATE -Wno-maybe-uninitialized)  # g++ 12 sees it in its own <regex>
  endif()
  set(arguments --gtest_brief=1)
  if(HORNER_SANITIZED AND name STREQUAL executions_test)
    # one variant of each kind of stage: sanitized kernels are slow
    set(kinds softmax softmax_window gated_decay l2 based centred_taylor3 entmax15 topk8 sa_softmax ssmax delta kda near_taylor2)
    list(TRANSFORM kinds PREPEND */)
    list(TRANSFORM kinds APPEND _Float)
    list(JOIN kinds : kinds)
    list(APPEND arguments --gtest_filter=${kinds})
  elseif(HORNER_SANITIZED AND name STREQUAL fused_cpu_test)
    list(APPEND arguments --gtest_filter=-Memory.*)  # the sanitizer has an allocator of its own
  elseif(HORNER_SANITIZED AND name STREQUAL state_test)
    list(APPEND arguments --gtest_filter=-States.OfLongStreamsStayRight)  # a million tokens
  endif()
  set(parts 0)
  if(name STREQUAL executions_test)
    set(parts 0 1 2 3)  # the longest: in parts that run side by side
  elseif(name MATCHES "^(mutants|adversarial)_test$")
    set(parts 0 1)
  endif()
  # Memory stays in the process: the reference makes the same large tensors again and again.
  set(memory "MALLOC_MMAP_THRESHOLD_=33554432;MALLOC_TRIM_THRESHOLD_=4000000000;MALLOC_TOP_PAD_=67108864")
  list(LENGTH parts all)
  foreach(part ${parts})
    add_test(NAME ${name}_${part} COMMAND ${name} ${arguments})
    set_tests_properties(${name}_${part} PROPERTIES ENVIRONMENT
      "GTEST_TOTAL_SHARDS=${all};GTEST_SHARD_INDEX=${part};ASAN_OPTIONS=detect_leaks=0;UBSAN_OPTIONS=halt_on_error=1;OMP_WAIT_POLICY=PASSIVE;${memory}")
  endforeach()
endforeach()
if(NOT HORNER_SANITIZED)
  add_executable(tokenizer_tool tests/tokenizer_tool.cpp)
  target_link_libraries(tokenizer_tool PRIVATE horner_text)
  add_executable(model_tool tests/model_tool.cpp)
  target_link_libraries(model_tool PRIVATE horner_nn)
  add_executable(comm_tool tests/comm_tool.cpp)
  target_link_libraries(comm_tool PRIVATE horner_train)
  foreach(tool model_tool comm_tool)
    target_precompile_headers(${tool} REUSE_FROM horner_attn)
  endforeach()
  add_executable(report_tool tests/report_tool.cpp)
  target_link_libraries(report_tool PRIVATE horner_report)
  add_executable(safetensors_tool tests/safetensors_tool.cpp)
  target_link_libraries(safetensors_tool PRIVATE horner_files)
  foreach(name python_test dropout_test packing_test transforms_test compile_test nn_test fuzz_test peers_test hf_test hf_families_test cli_test recurrent_cli_test bench_test layers_test pip_test install_test safetensors_test tokenizer_test data_test model_test pattern_test train_test comm_test events_test report_test study_test cluster_test folders_test diagnose_test comfort_test)
    add_test(NAME ${name} COMMAND ${Python_EXECUTABLE} -m pytest -q -p no:cacheprovider
             ${CMAKE_SOURCE_DIR}/tests/${name}.py)
    set_tests_properties(${name} PROPERTIES ENVIRONMENT
      "PYTHONPATH=${CMAKE_BINARY_DIR}/python;HORNER=${CMAKE_BINARY_DIR}/horner;GOMP_SPINCOUNT=5000")  # as the command sets it
  endforeach()
endif()
if(CMAKE_CUDA_COMPILER AND NOT HORNER_CUDA AND NOT HORNER_SANITIZED AND CMAKE_SYSTEM_PROCESSOR STREQUAL x86_64)
  include(cmake/emulated.cmake)
endif()
