# The library for other programs: libhorner.so, its public headers, and what find_package(horner) reads.
include(CMakePackageConfigHelpers)
set(public_headers attn/attend.h attn/carry.h attn/catalog.h attn/join.h attn/make_state.h attn/mask.h attn/plan.h attn/rollback.h attn/spec.h attn/state.h core/check.h horner.h)
add_library(horner_library SHARED src/horner.cpp)
add_library(horner::horner ALIAS horner_library)
# All of attn and files, also what nothing here calls: other programs do.
target_link_libraries(horner_library PRIVATE
  "-Wl,--whole-archive,$<TARGET_FILE:horner_attn>,$<TARGET_FILE:horner_files>,--no-whole-archive" horner_files INTERFACE torch::cpu)
target_compile_definitions(horner_library PRIVATE HORNER_VERSION="${PROJECT_VERSION}" HORNER_TORCH="${Torch_VERSION}")
target_include_directories(horner_library INTERFACE $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/src> $<INSTALL_INTERFACE:include/horner>)
target_compile_features(horner_library INTERFACE cxx_std_20)
target_precompile_headers(horner_library REUSE_FROM horner_attn)
set_target_properties(horner_library PROPERTIES OUTPUT_NAME horner EXPORT_NAME horner VERSION ${PROJECT_VERSION} SOVERSION 0)
install(TARGETS horner_library EXPORT horner DESTINATION lib)
foreach(header ${public_headers})
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES src/${header} DESTINATION include/horner/${folder})
endforeach()
install(EXPORT horner NAMESPACE horner:: FILE horner-targets.cmake DESTINATION lib/cmake/horner)
configure_file(cmake/horner-config.cmake.in horner-config.cmake @ONLY)
write_basic_package_version_file(horner-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES cmake/FindTorch.cmake ${CMAKE_BINARY_DIR}/horner-config.cmake ${CMAKE_BINARY_DIR}/horner-config-version.cmake
        DESTINATION lib/cmake/horner)
