# Only the variables are looked at, without the resources (tests/variables): that needs no provider.
#
# A run holds one wrong value for each of several variables, and each of them has to be refused. A
# variable whose check reads another one is not looked at when the other is wrong, so those have
# runs of their own.

run "a_name_with_a_dot" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                      = "my.cache"
    prefix                    = "s3kv*"
    expiration_days           = 0
    kms_key_arn               = "arn:aws:kms:eu-west-1:111122223333:alias/cache"
    permissions_boundary_arn  = "boundary"
    max_error_percent         = 0
    max_first_byte_latency_ms = 0
    max_bucket_gib            = 0
    gateway_endpoint          = { vpc_id = "vpc-1", route_table_ids = [] }
    settings                  = "host_bytes"
  }

  expect_failures = [
    var.name,
    var.prefix,
    var.expiration_days,
    var.kms_key_arn,
    var.permissions_boundary_arn,
    var.max_error_percent,
    var.max_first_byte_latency_ms,
    var.max_bucket_gib,
    var.gateway_endpoint,
    var.settings,
  ]
}

run "a_name_with_a_capital" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                      = "cAche"
    prefix                    = "s3kv?"
    expiration_days           = 1.5
    kms_key_arn               = "arn:aws:kms:eu-west-1:1111:key/11111111-2222-3333-4444-555555555555"
    permissions_boundary_arn  = "arn:aws:iam::1111:policy/boundary"
    max_error_percent         = 100
    max_first_byte_latency_ms = -1
    max_bucket_gib            = -1
    gateway_endpoint          = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"], extra_bucket_names = ["*"] }
    settings                  = { host_byte = "32GiB" }
  }

  expect_failures = [
    var.name,
    var.prefix,
    var.expiration_days,
    var.kms_key_arn,
    var.permissions_boundary_arn,
    var.max_error_percent,
    var.max_first_byte_latency_ms,
    var.max_bucket_gib,
    var.gateway_endpoint,
    var.settings,
  ]
}

run "a_name_of_64_characters" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                     = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    prefix                   = "s3kv$"
    expiration_days          = -1
    kms_key_arn              = "arn:aws:kms:eu-west-1::key/11111111-2222-3333-4444-555555555555"
    permissions_boundary_arn = "arn:aws:iam::111122223333:role/boundary"
    max_error_percent        = -1
    gateway_endpoint         = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"], extra_bucket_names = ["**"] }
    alarm_actions            = ["pager"]
    settings                 = { bucket = "another" }
  }

  expect_failures = [
    var.name,
    var.alarm_actions,
    var.prefix,
    var.expiration_days,
    var.kms_key_arn,
    var.permissions_boundary_arn,
    var.max_error_percent,
    var.gateway_endpoint,
    var.settings,
  ]
}

run "a_name_of_two_characters" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                     = "ab"
    prefix                   = "s3kv/"
    kms_key_arn              = "xarn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555"
    permissions_boundary_arn = "arn:aws:iam::111122223333:policy/"
    gateway_endpoint         = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"], extra_bucket_names = ["?*"] }
    alarm_actions            = ["x-arn:aws:sns:eu-west-1:111122223333:pager"]
    settings                 = { prefix = "another" }
  }

  expect_failures = [
    var.name,
    var.alarm_actions,
    var.prefix,
    var.kms_key_arn,
    var.permissions_boundary_arn,
    var.gateway_endpoint,
    var.settings,
  ]
}

run "a_name_that_starts_with_a_hyphen" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                     = "-cache"
    prefix                   = "/s3kv"
    kms_key_arn              = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555*"
    permissions_boundary_arn = "x-arn:aws:iam::111122223333:policy/boundary"
    gateway_endpoint         = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"], extra_bucket_names = [""] }
    settings                 = { region = "us-east-1" }
  }

  expect_failures = [
    var.name,
    var.prefix,
    var.kms_key_arn,
    var.permissions_boundary_arn,
    var.gateway_endpoint,
    var.settings,
  ]
}

run "a_name_that_ends_with_a_hyphen" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                     = "cache-"
    prefix                   = "team//s3kv"
    kms_key_arn              = "arn:aws:kms::111122223333:key/11111111-2222-3333-4444-555555555555"
    permissions_boundary_arn = "arn:aws:iam:::policy/boundary"
    settings                 = { bucket_bytes = "1TiB" }
  }

  expect_failures = [
    var.name,
    var.prefix,
    var.kms_key_arn,
    var.permissions_boundary_arn,
    var.settings,
  ]
}

run "a_name_that_starts_with_xn" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name        = "xn--cache"
    prefix      = ""
    kms_key_arn = "arn:aws:kms:*:111122223333:key/11111111-2222-3333-4444-555555555555"
    settings    = { bucket_idle_s = 86400 }
  }

  expect_failures = [
    var.name,
    var.prefix,
    var.kms_key_arn,
    var.settings,
  ]
}

run "a_name_that_starts_with_sthree" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name        = "sthree-cache"
    prefix      = "_s3kv"
    kms_key_arn = "arn:aws:s3:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555"
    settings    = { bucket_idle_s = 1 }
  }

  expect_failures = [
    var.name,
    var.prefix,
    var.kms_key_arn,
    var.settings,
  ]
}

run "a_name_that_starts_with_amzn_s3_demo" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name     = "amzn-s3-demo-cache"
    prefix   = "team/.s3kv"
    settings = ["host_bytes"]
  }

  expect_failures = [
    var.name,
    var.prefix,
    var.settings,
  ]
}

run "a_name_that_ends_with_s3alias" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name   = "cache-s3alias"
    prefix = "s3kv a"
  }

  expect_failures = [
    var.name,
    var.prefix,
  ]
}

run "a_name_that_ends_with_ol_s3" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name = "cache--ol-s3"
  }

  expect_failures = [var.name]
}

run "a_name_that_ends_with_x_s3" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name = "cache--x-s3"
  }

  expect_failures = [var.name]
}

run "a_name_that_ends_with_table_s3" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name = "cache--table-s3"
  }

  expect_failures = [var.name]
}
