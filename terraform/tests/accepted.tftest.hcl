# The outermost values that are allowed: a check that refuses too much fails here.

run "short_and_low" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                      = "abc"
    prefix                    = "s"
    expiration_days           = 1
    kms_key_arn               = "arn:aws-us-gov:kms:us-gov-west-1:111122223333:key/mrk-1234abcd12ab34cd56ef1234567890ab"
    permissions_boundary_arn  = "arn:aws:iam::aws:policy/ReadOnlyAccess"
    max_error_percent         = 0.01
    max_first_byte_latency_ms = 0.5
    max_bucket_gib            = 0.5
    request_metrics           = false
    alarm_actions             = ["arn:aws-cn:sns:cn-north-1:111122223333:pager"]
    irsa                      = { a = { oidc_provider_arn = "arn:aws-cn:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "s", access = "reader" } }
    gateway_endpoint          = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"], extra_bucket_names = ["a1.b-*-models?"] }
    settings                  = { host_bytes = 34359738368, put_headers = { x-amz-acl = "private" }, bucket_bytes = 0, bucket_idle_s = 0 }
  }
}

run "long_and_high" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                     = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa0-9xyz"
    prefix                   = "0Team.a_b=c-d/S3kv.9_=-/x"
    expiration_days          = 3650
    kms_key_arn              = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555"
    permissions_boundary_arn = "arn:aws-us-gov:iam::111122223333:policy/path/boundary"
    max_error_percent        = 99.9
    cleaner                  = true
    settings                 = { bucket_bytes = "10TiB", bucket_idle_s = 86400 }
  }
}

run "a_role_of_64_characters" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name           = "cache"
    pod_identities = { pppppppppppppppppppppppppppppppppppppppppppppppppppppppppp = { cluster_name = "c", namespace = "n", service_account = "s", access = "reader" } }
    irsa           = { iiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiii = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "s", access = "writer" } }
  }
}

run "a_budget_that_one_role_may_keep" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name           = "cache"
    cleaner        = true
    settings       = { bucket_bytes = "10TiB", bucket_idle_s = 86400 }
    pod_identities = { a = { cluster_name = "c", namespace = "n", service_account = "s" } }
    irsa           = { b = { oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/o", namespace = "n", service_account = "s", access = "cleaner" } }
  }
}

# Whoever writes has a role of its own making.
run "a_budget_beside_readers" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name           = "cache"
    cleaner        = true
    settings       = { bucket_bytes = "10TiB" }
    pod_identities = { a = { cluster_name = "c", namespace = "n", service_account = "s", access = "reader" } }
  }
}

run "a_writer_without_a_budget" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name           = "cache"
    cleaner        = true
    settings       = { bucket_bytes = 0 }
    pod_identities = { a = { cluster_name = "c", namespace = "n", service_account = "s" } }
  }
}

# Every writer of a directory bucket may delete.
run "a_budget_in_express" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                 = "cache"
    storage              = "express"
    availability_zone_id = "apne1-az4"
    cleaner              = true
    settings             = { bucket_bytes = "10TiB" }
    pod_identities       = { a = { cluster_name = "c", namespace = "n", service_account = "s" } }
  }
}

run "a_name_that_just_fits_express" {
  command = plan

  module {
    source = "./tests/variables"
  }

  variables {
    name                 = "a-name-of-forty-six-characters-0123456789-0123"
    storage              = "express"
    availability_zone_id = "apne1-az4"
    request_metrics      = true
    settings             = { bucket_bytes = "10TiB" }
    alarm_actions        = ["arn:aws:sns:ap-northeast-1:111122223333:pager"]
    gateway_endpoint     = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"] }
  }
}
